"""How a program begins, ends and speaks, and its flags."""
