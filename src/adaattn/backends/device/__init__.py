"""What executors with kernels in Triton share: functions on the device, and their launch."""
