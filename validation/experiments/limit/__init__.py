"""Device memory and step time against what the machine allows: see protocols/limit.md."""
