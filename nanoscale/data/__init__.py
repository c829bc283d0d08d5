from nanoscale.data.dataset import Dataset, open_data

__all__ = ["Dataset", "open_data"]
