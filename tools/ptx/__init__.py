# SPDX-License-Identifier: MIT
"""What stands in for NVIDIA's GPUs and drivers: an interpreter of PTX, and loaders of OpenCL.

machine.py             executes PTX; program.py reads its text
opencl_machine.c       a loader of OpenCL with one device, whose back end is one of
interpreted_machine.c    machine.py
cuda_machine.c           libcuda.so.1, see ../cuda_machine.py
fake_cuda.c            a driver for CUDA that runs machine.py, or nothing, see fake_cuda.py
"""
