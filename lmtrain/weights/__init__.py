"""What gives a model its values and takes them out: new, a checkpoint, Hugging Face, PEFT, a frozen base; exports."""
