"""Lists, devices, shards and norms of gradients, for losses, optimizers and scalers."""
