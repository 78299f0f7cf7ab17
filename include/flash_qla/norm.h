/* The gated RMS norm behind the delta rule. flash_qla.h includes it.
 *
 * Norm before gate:  y = (x r w + bias) act(z),            r = (mean x^2 + eps)^-1/2
 * Gate first:        y = v r w + bias,   v = x act(z),     r = (mean v^2 + eps)^-1/2
 * Everything is computed in float32 (float64 for float64), and rounded once.
 */
#ifndef FLASH_QLA_NORM_H_
#define FLASH_QLA_NORM_H_

#include "flash_qla/convolution.h"
#include "flash_qla/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct flash_qla_norm_gated_arguments {
  size_t struct_size; /* sizeof(flash_qla_norm_gated_arguments), set by the init function; another one is refused */
  flash_qla_options options;    /* as in convolution.h */
  flash_qla_tensor x;           /* [.., V] of 1 to 4 dimensions, float (or float64 on the CPU) */
  flash_qla_tensor z;           /* as x; absent: no gate */
  flash_qla_tensor weight;      /* [V] float, optional */
  flash_qla_tensor bias;        /* [V] float, optional */
  flash_qla_tensor y;           /* out, as x */
  flash_qla_tensor inverse_rms; /* out, optional: r, one a row in their order, float32 (float64) */
  double eps;                   /* 1e-6 unless given */
  int32_t activation;           /* FLASH_QLA_ACTIVATION_SILU or FLASH_QLA_ACTIVATION_SIGMOID */
  int32_t gate_first;
} flash_qla_norm_gated_arguments;

/* Absent outputs are not computed. */
typedef struct flash_qla_norm_gated_backward_arguments {
  size_t struct_size;
  flash_qla_options options;
  flash_qla_tensor x, z, weight, bias; /* as in the forward */
  flash_qla_tensor dy;                 /* as x, any strides */
  flash_qla_tensor dx, dz;             /* out, as x */
  flash_qla_tensor dweight, dbias;     /* out, [V] float */
  double eps;
  int32_t activation;
  int32_t gate_first;
} flash_qla_norm_gated_backward_arguments;

/* Fill in the defaults: the structure's size, everything absent or off, eps 1e-6, SiLU, device CPU. Do nothing with
 * NULL. */
FLASH_QLA_API void flash_qla_norm_gated_arguments_init(flash_qla_norm_gated_arguments* args);
FLASH_QLA_API void flash_qla_norm_gated_backward_arguments_init(flash_qla_norm_gated_backward_arguments* args);

FLASH_QLA_API flash_qla_status flash_qla_norm_gated_can_implement(const flash_qla_norm_gated_arguments* args);
FLASH_QLA_API flash_qla_status flash_qla_norm_gated_workspace_size(const flash_qla_norm_gated_arguments* args,
                                                                   size_t* bytes);
FLASH_QLA_API flash_qla_status flash_qla_norm_gated_run(const flash_qla_norm_gated_arguments* args, void* workspace,
                                                        size_t workspace_bytes, void* stream);
FLASH_QLA_API flash_qla_status flash_qla_norm_gated_explain(const flash_qla_norm_gated_arguments* args, char* text,
                                                            size_t size);

FLASH_QLA_API flash_qla_status
flash_qla_norm_gated_backward_can_implement(const flash_qla_norm_gated_backward_arguments* args);
FLASH_QLA_API flash_qla_status
flash_qla_norm_gated_backward_workspace_size(const flash_qla_norm_gated_backward_arguments* args, size_t* bytes);
FLASH_QLA_API flash_qla_status flash_qla_norm_gated_backward_run(const flash_qla_norm_gated_backward_arguments* args,
                                                                 void* workspace, size_t workspace_bytes, void* stream);
FLASH_QLA_API flash_qla_status
flash_qla_norm_gated_backward_explain(const flash_qla_norm_gated_backward_arguments* args, char* text, size_t size);

#ifdef __cplusplus
}
#endif
#endif /* FLASH_QLA_NORM_H_ */
