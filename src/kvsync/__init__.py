"""kvsync."""
