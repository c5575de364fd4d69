"""What several systems share: admission, batches, slices and checks of settings."""
