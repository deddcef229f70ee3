"""What computes: the device, its BLAS, and the measurement that it is true F32."""
