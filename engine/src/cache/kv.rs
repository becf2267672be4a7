//! KV cache of one layer and one sequence: keys and values of every position, or of the last ones. A read returns the
//! same shapes as in mlx-lm, so the same kernels read it. Not here: the format of keys and values
//! ([`KvFormat`](super::format::KvFormat)), and how arrays grow ([`PositionCache`]).

use mlx_rs::{Array, error::Exception};

use super::{
    format::{KvFormat, KvView},
    positions::PositionCache,
};

/// Keys and values of every position.
#[derive(Clone, Debug, Default)]
pub struct KvCache {
    format: KvFormat,
    pub(super) positions: PositionCache,
}

impl KvCache {
    /// An empty KV cache.
    pub fn new(format: KvFormat) -> Self {
        Self { format, ..Self::default() }
    }

    /// Format of its keys and values.
    pub fn format(&self) -> KvFormat {
        self.format
    }

    /// Appends keys and values, `[batch, heads, positions, width]`; returns a view of everything in the
    /// cache.
    pub fn append(&mut self, keys: &Array, values: &Array) -> Result<KvView, Exception> {
        self.positions.append(self.format.encode(keys, values)?)?;
        self.view()
    }

    /// A view of everything in the cache.
    pub fn view(&self) -> Result<KvView, Exception> {
        self.format.view(&self.positions.tensors()?)
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs::{Dtype, ops::concatenate};

    use super::*;
    use russet_wire::engine_options::KvCacheType;

    /// Values of some positions, for one head of size 32; each encodes its position.
    fn numbers(from: i32, count: i32) -> Array {
        let place =
            |value: i32| (0..32).map(move |at| if at % 2 == 0 { value as f32 } else { -value as f32 });
        let values: Vec<f32> = (from..from + count).flat_map(place).collect();
        Array::from_slice(&values, &[1, 1, count, 32])
    }

    fn bytes(array: &Array) -> Vec<u8> {
        let bytes = array.contiguous().unwrap().view_dtype(Dtype::Uint8).unwrap();
        bytes.as_slice::<u8>().to_vec()
    }

    fn forms() -> [KvFormat; 3] {
        [KvCacheType::AsComputed, KvCacheType::Int8, KvCacheType::Int4]
            .map(|kind| KvFormat::new(kind, 32).unwrap())
    }

    /// Checks that the cache equals, bit by bit, these values in its format.
    fn check(cache: &KvCache, keys: &Array, values: &Array, story: &str) {
        let expected = cache.format.encode(keys, values).unwrap();
        let held = cache.positions.slice(0..cache.positions.offset()).unwrap().unwrap();
        assert_eq!(held.len(), cache.format.tensor_count(), "{story}");
        for (held, expected) in held.iter().zip(&expected) {
            assert_eq!((held.shape(), held.dtype()), (expected.shape(), expected.dtype()), "{story}");
            assert!(bytes(held) == bytes(expected), "{story}");
        }
    }

    #[test]
    fn kv_cache_returns_appended_positions_in_order() {
        for form in forms() {
            for pieces in [vec![1, 1, 1], vec![255, 1, 1], vec![256, 1], vec![300, 300, 7], vec![2048, 1, 1]]
            {
                let mut cache = KvCache::new(form);
                let mut total = 0;
                for &count in &pieces {
                    let new = numbers(total, count);
                    let held = cache.append(&new, &new.negative().unwrap()).unwrap();
                    total += count;
                    assert_eq!(held.positions(), total, "{pieces:?}");
                    let all = numbers(0, total);
                    check(
                        &cache,
                        &all,
                        &all.negative().unwrap(),
                        &format!("{form:?}, {pieces:?} after {total}"),
                    );
                }
                assert_eq!(cache.positions.offset(), total);
            }
        }
    }

    #[test]
    fn kv_cache_overwrites_truncated_positions() {
        for form in forms() {
            for (before, length, after) in [(10, 4, 3), (300, 256, 1), (300, 20, 500), (5, 0, 5)] {
                let mut cache = KvCache::new(form);
                cache.append(&numbers(1000, before), &numbers(1000, before)).unwrap();
                cache.positions.truncate(length);
                assert_eq!(cache.positions.offset(), length);
                cache.append(&numbers(0, after), &numbers(0, after)).unwrap();
                let all = concatenate(&[numbers(1000, length), numbers(0, after)], 2);
                let all = if length == 0 { numbers(0, after) } else { all.unwrap() };
                check(&cache, &all, &all, &format!("{form:?}, {before} → {length} → +{after}"));
            }
        }
    }

    #[test]
    fn kv_cache_slices_append_unchanged() {
        for form in forms() {
            let (mut cache, mut other) = (KvCache::new(form), KvCache::new(form));
            assert!(cache.positions.slice(0..1).unwrap().is_none(), "there is nothing yet");
            let all = numbers(0, 300);
            cache.append(&all, &all).unwrap();
            for from in (0..300).step_by(60) {
                other.positions.append(cache.positions.slice(from..from + 60).unwrap().unwrap()).unwrap();
            }
            check(&other, &all, &all, &format!("{form:?}"));
            assert_eq!(other.positions.readiness_probe().unwrap().len(), form.tensor_count());
        }
    }
}
