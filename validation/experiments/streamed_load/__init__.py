"""Load checkpoints in fresh processes and watch memory and rate; see protocols/streamed-load.md."""
