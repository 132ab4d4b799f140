"""One pass of a model on fake tensors: shapes, FLOPs and dtypes without memory or arithmetic."""
