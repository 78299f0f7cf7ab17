def is_cute_dsl_arch_supported(*capability):
    return True
