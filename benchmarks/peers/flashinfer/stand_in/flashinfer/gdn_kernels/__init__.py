from .delta_rule_dsl import chunk_gated_delta_rule_sm90, cp_delta_rule_dsl_sm90

# Of other devices.
_chunk_gated_delta_rule_gdn_cp_sm100 = chunk_gated_delta_rule_sm100 = cp_delta_rule_dsl_sm100 = None
chunk_gated_delta_rule_sm120 = cp_delta_rule_dsl_sm120 = None
