/* A C99 program against the installed C interface: one decode step from a zero state, whose result is known by hand. */
#include <flash_qla/flash_qla.h>
#include <stdio.h>
#include <string.h>

static flash_qla_tensor tensor4(float* data, int64_t a, int64_t b, int64_t c, int64_t d) {
  flash_qla_tensor t;
  memset(&t, 0, sizeof(t));
  t.data = data;
  t.ndim = 4;
  t.dtype = FLASH_QLA_FLOAT32;
  t.shape[0] = a, t.shape[1] = b, t.shape[2] = c, t.shape[3] = d;
  t.stride[0] = b * c * d, t.stride[1] = c * d, t.stride[2] = d, t.stride[3] = 1;
  return t;
}

int main(void) {
  /* S = k v^T with beta absent (one), so o = scale * (q . k) * v = 0.5 * 11 * v. */
  float q[2] = {1, 2}, k[2] = {3, 4}, v[3] = {1, -1, 2}, o[3] = {0, 0, 0};
  const float expected[3] = {5.5f, -5.5f, 11.0f};
  static char workspace[1 << 20];
  char text[2048];
  size_t bytes = 0;
  int i;
  flash_qla_status status;
  flash_qla_forward_arguments args;
  flash_qla_forward_arguments_init(&args);
  args.options.scale = 0.5;
  args.q = tensor4(q, 1, 1, 1, 2);
  args.k = tensor4(k, 1, 1, 1, 2);
  args.v = tensor4(v, 1, 1, 1, 3);
  args.o = tensor4(o, 1, 1, 1, 3);

  status = flash_qla_recurrent_workspace_size(&args, &bytes);
  if (status.code == FLASH_QLA_OK && bytes <= sizeof(workspace))
    status = flash_qla_recurrent_run(&args, workspace, bytes, NULL);
  if (status.code != FLASH_QLA_OK) {
    fprintf(stderr, "%s\n", status.message);
    return 1;
  }
  for (i = 0; i < 3; ++i) {
    printf("o[%d] = %g\n", i, o[i]);
    if (o[i] < expected[i] - 1e-5f || o[i] > expected[i] + 1e-5f) return 1;
  }

  /* A call that the contract forbids comes back as a message, not as an abort. */
  args.v = tensor4(v, 1, 1, 3, 1);
  args.k = tensor4(k, 1, 1, 2, 1);
  status = flash_qla_recurrent_can_implement(&args);
  if (status.code == FLASH_QLA_OK || status.message[0] == '\0') return 1;
  printf("refused as it should be: %s\n", status.message);

  status = flash_qla_build_info(text, sizeof(text));
  if (status.code != FLASH_QLA_OK) return 1;
  printf("%s\n", text);
  return 0;
}
