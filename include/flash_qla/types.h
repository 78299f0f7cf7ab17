/* What all operations of the C interface have in common: status, tensors and options. flash_qla.h includes it.
 * It needs no framework and no CUDA header; it is valid C99 and C++17.
 */
#ifndef FLASH_QLA_TYPES_H_
#define FLASH_QLA_TYPES_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define FLASH_QLA_API __declspec(dllexport)
#else
#define FLASH_QLA_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Tokens of one chunk of the chunked algorithm: the width of A, and the grid of h, checkpoints and cumsums. */
#define FLASH_QLA_CHUNK_SIZE 64

/* Largest head dimension, keys and values alike. */
#define FLASH_QLA_MAX_HEAD_DIM 256

/* Largest number of draft tokens that one decode call takes. */
#define FLASH_QLA_MAX_DRAFT_TOKENS 16

/* Most tokens (B * T) and most sequences of a call. */
#define FLASH_QLA_MAX_TOKENS INT32_MAX

typedef enum flash_qla_code {
  FLASH_QLA_OK = 0,
  FLASH_QLA_INVALID_VALUE = 1,   /* a shape, size or combination that the contract forbids */
  FLASH_QLA_INVALID_TYPE = 2,    /* a dtype or device that the contract forbids */
  FLASH_QLA_NOT_IMPLEMENTED = 3, /* legal, but not offered by this build, machine or version */
  FLASH_QLA_RUNTIME_ERROR = 4    /* the device or the system reported a failure */
} flash_qla_code;

/* Outcome of a call. `message` is empty on success, else "operation: argument rule (what was given)". */
typedef struct flash_qla_status {
  int32_t code; /* flash_qla_code */
  char message[508];
} flash_qla_status;

typedef enum flash_qla_dtype {
  FLASH_QLA_FLOAT32 = 0,
  FLASH_QLA_BFLOAT16 = 1,
  FLASH_QLA_FLOAT16 = 2,
  FLASH_QLA_FLOAT64 = 3,
  FLASH_QLA_INT32 = 4,
  FLASH_QLA_INT64 = 5,
  FLASH_QLA_BOOL = 6 /* one byte, zero or not */
} flash_qla_dtype;

typedef enum flash_qla_device_type { FLASH_QLA_CPU = 0, FLASH_QLA_CUDA = 1 } flash_qla_device_type;

#define FLASH_QLA_MAX_DIMS 6

/* A strided view of somebody else's memory. A zeroed structure (ndim 0) is an absent tensor. */
typedef struct flash_qla_tensor {
  void* data; /* first element; may be NULL where the tensor has no elements, and for can_implement
                 and workspace_size, which look at no memory */
  int64_t shape[FLASH_QLA_MAX_DIMS];  /* elements */
  int64_t stride[FLASH_QLA_MAX_DIMS]; /* elements, any value; 0 repeats (inputs only) */
  int32_t ndim;                       /* 1 .. FLASH_QLA_MAX_DIMS; 0: absent */
  int32_t dtype;                      /* flash_qla_dtype */
} flash_qla_tensor;

/* How one sequence may be cut into segments that are computed beside each other. */
typedef enum flash_qla_cp_mode {
  FLASH_QLA_CP_OFF = 0,      /* a sequence's bits depend on nothing but the sequence */
  FLASH_QLA_CP_AUTO = 1,     /* planned from the whole batch */
  FLASH_QLA_CP_INVARIANT = 2 /* planned from each sequence's own length alone */
} flash_qla_cp_mode;

/* What is common to all operations. Start from flash_qla_options_default(). */
typedef struct flash_qla_options {
  double scale;                       /* multiplies q; NaN: K^-1/2. 0.0 is 0.0 */
  int32_t state_v_first;              /* states are [.., V, K] instead of [.., K, V] */
  int32_t use_qk_l2norm_in_kernel;    /* q, k -> x / sqrt(sum x^2 + 1e-6), rounded to their dtype */
  int32_t use_gate_in_kernel;         /* g is raw: log decay = -exp(A_log) * softplus(g + dt_bias) */
  int32_t use_beta_sigmoid_in_kernel; /* beta is raw: sigmoid(beta) */
  int32_t allow_neg_eigval;           /* with use_beta_sigmoid_in_kernel: 2 * sigmoid(beta) */
  int32_t cp_mode;                    /* flash_qla_cp_mode */
  int32_t force_intra_cp;             /* split wherever it is possible (tests) */
  double cp_tolerance;                /* dropped part of a state, relative to the largest state norm, at most
                                         1.2e-7; <= 0: the default, e^-16 */
  int32_t check_device_data;          /* read and check cu_seqlens and indices (waits for the device) */
  int32_t num_threads;                /* CPU threads; 0: as many as the process may use */
  const char* path;                   /* NULL: chosen by the library; else the name of a path, as explain() prints it */
  const char* operation;              /* name that error messages begin with; NULL: the operation's own */
  int32_t device_type;                /* flash_qla_device_type of every tensor */
  int32_t device_index;               /* CUDA ordinal */
} flash_qla_options;

#ifdef __cplusplus
}
#endif
#endif /* FLASH_QLA_TYPES_H_ */
