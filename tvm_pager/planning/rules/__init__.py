"""Plans by rule, as published systems make them: what stays below the device, what returns when."""
