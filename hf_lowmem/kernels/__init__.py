"""The AdamW step on flat buffers: ``adam`` is the definition in plain torch, ``native`` the C++ core that equals it."""
