// What the engine computes beside matrix products and attention. Activations are rows of f32.

// result[row] = table[token_ids[row]]; a work-item an element
kernel void embed(global float* result, global const float* table, global const int* token_ids,
                  int cols) {
  const int i = get_global_id(0);
  result[i] = table[token_ids[i / cols] * cols + i % cols];
}

// result = x / sqrt(mean(x^2) + epsilon) * weight; a work-item a row
kernel void rms_norm(global float* result, global const float* x, global const float* weight,
                     int cols, float epsilon) {
  const int first = get_global_id(0) * cols;
  float squares = 0;
  for (int i = 0; i < cols; ++i) squares += x[first + i] * x[first + i];
  const float scale = 1 / sqrt(squares / cols + epsilon);
  for (int i = 0; i < cols; ++i) result[first + i] = x[first + i] * scale * weight[i];
}

// Turns the pairs (i, i + head_size / 2) of the first `heads` heads of each row by its position; a
// work-item a pair
kernel void rope(global float* rows, global const int* positions, int cols, int heads,
                 int head_size, float base) {
  const int half_size = head_size / 2;
  const int row = get_global_id(0) / (heads * half_size),
            pair = get_global_id(0) % (heads * half_size);
  const int i = pair % half_size;
  global float* const head = rows + row * cols + pair / half_size * head_size;
  const float angle = positions[row] * pow(base, -(float)i / half_size);
  const float a = head[i], b = head[i + half_size], c = cos(angle), s = sin(angle);
  head[i] = a * c - b * s;
  head[i + half_size] = a * s + b * c;
}

// result = silu(gate) * up of rows that hold gate, then up; a work-item an element of the result
kernel void silu_mul(global float* result, global const float* gate_up, int cols) {
  const int i = get_global_id(0), first = i / cols * 2 * cols + i % cols;
  const float gate = gate_up[first];
  result[i] = gate / (1 + exp(-gate)) * gate_up[first + cols];
}
