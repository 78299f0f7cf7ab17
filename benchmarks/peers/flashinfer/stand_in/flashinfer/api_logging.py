def flashinfer_api(function=None, *, trace=None):
    return (lambda f: f) if function is None else function
