"""What copies and compute do over one step: see protocols/timeline.md."""
