"""Every formula once, over the array API: statistics, policies, softmax, fitting, input checks."""
