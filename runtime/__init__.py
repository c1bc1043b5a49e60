"""The only room that talks to devices: processes, detection, calibration, emit, pipeline, kernels."""
