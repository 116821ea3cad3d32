"""CNN convolution algorithms: which of them a device grants for a layer, what they cost, how exact they are."""
