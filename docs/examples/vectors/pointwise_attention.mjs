// ReLU attention, relu(q kᵀ/√d)/S · v, held against its test vectors, without packages:
//
//   node pointwise_attention.mjs VECTORS pointwise_attention/float32/small-cross mine.safetensors
//
// It serves plain cases, shows the largest error relative to what is allowed, and writes what it read and computed for
// `python -m attnkit_conformance compare VECTORS mine.safetensors`.
import { writeFileSync } from "node:fs";

import { readCase } from "./read_vectors.mjs";

function attend({ x: q, shape: [B, H, L, d] }, { x: k, shape: [, , S] }, { x: v, shape: [, , , e] }) {
  const o = new q.constructor(B * H * L * e);
  for (let row = 0; row < B * H * L; row++) {
    const first = Math.floor(row / L) * S;
    const sums = new Float64Array(e);
    for (let j = first; j < first + S; j++) {
      let s = 0;
      for (let c = 0; c < d; c++) s += (q[row * d + c] * k[j * d + c]) / Math.sqrt(d);
      for (let c = 0; c < e; c++) sums[c] += (Math.max(s, 0) / S) * v[j * e + c];
    }
    o.set(sums, row * e);
  }
  return o;
}

/** A safetensors file: the length of a JSON header, the header, the bytes. */
function writeTensors(path, tensors) {
  let offset = 0;
  const header = Object.entries(tensors).map(([name, { x, shape, dtype }]) => [
    name, { dtype: { float64: "F64", float32: "F32" }[dtype], shape, data_offsets: [offset, (offset += x.byteLength)] },
  ]);
  const text = new TextEncoder().encode(JSON.stringify(Object.fromEntries(header)));
  const length = new Uint8Array(new BigUint64Array([BigInt(text.length)]).buffer);
  const data = Object.values(tensors).map(({ x }) => new Uint8Array(x.buffer));
  writeFileSync(path, Buffer.concat([length, text, ...data]));
}

const [folder, id, out] = process.argv.slice(2);
const { tensors, params } = readCase(folder, id);
const { "in.q": q, "in.k": k, "in.v": v, "out.o": golden, "allowed.out.o": allowed } = tensors;
if (Object.keys(params).length) throw new Error(`${id} has parameters: ${Object.keys(params)}`);
const o = attend(q, k, v);
const share = o.reduce((worst, x, n) => Math.max(worst, Math.abs(x - golden.x[n]) / allowed.x[n]), 0);
console.log(`${id}: max error ${share.toPrecision(3)} of what is allowed`);
const mine = { "in.q": q, "in.k": k, "in.v": v, "out.o": { x: o, shape: golden.shape, dtype: q.dtype } };
writeTensors(out, Object.fromEntries(Object.entries(mine).map(([name, x]) => [`${id}/${name}`, x])));
process.exit(share <= 1 ? 0 : 1);
