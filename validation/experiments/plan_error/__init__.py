"""How far the plan is from what is measured: see validation/protocols/plan-error.md."""
