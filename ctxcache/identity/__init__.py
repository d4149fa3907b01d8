"""Who calls: tokens, and what a proven subject is granted."""
