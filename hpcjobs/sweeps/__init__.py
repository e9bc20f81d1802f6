"""Many runs of one program, each with parameters of its own: arrays that detach, resume and fit the queue."""
