"""The operations' Triton kernels, a file for each operation. Importing one imports Triton."""
