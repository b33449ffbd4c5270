"""The commands, and what they print. Light to import: torch comes when a command needs it."""
