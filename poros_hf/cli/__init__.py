"""The command `poros`: one small module a command."""
