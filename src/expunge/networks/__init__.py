"""Networks: their tensors by name, weights from anybody's checkpoint, adapters, releases."""
