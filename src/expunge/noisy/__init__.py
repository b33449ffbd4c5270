"""The paper: the noise, the certified vector, the noisy steps, and ``unlearn``."""
