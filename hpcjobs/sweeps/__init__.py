"""Many runs of one program with different parameters: arrays that detach, resume and fit the queue."""
