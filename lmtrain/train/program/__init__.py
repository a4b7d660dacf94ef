"""What a run compiles: the program, its memory and where its arrays lie."""
