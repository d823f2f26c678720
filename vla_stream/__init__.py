"""vla-stream: asynchronous RL post-training of Vision-Language-Action policies over Redis streams."""

__version__ = "0.1.0"
