"""What a training script is: its loops, forwards, backwards, and which values carry an autograd graph."""
