gdn_prefill_trace = gated_delta_rule_decode_trace = gdn_mtp_trace = gdn_replayssm_commit_trace = None
