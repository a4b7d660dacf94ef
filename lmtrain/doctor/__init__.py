"""What a run would see on this machine, and how to mend what would stop it: each file looks at one part of it."""
