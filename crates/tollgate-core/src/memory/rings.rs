//! The long logs of a shard, by index, so that a slot needs four bytes for one.

use crate::algorithm::Ring;

#[derive(Debug, Default)]
pub(super) struct Rings {
    rings: Vec<Ring>,
    free: Vec<u32>,
    entries_bytes: usize,
}

/// What an allocator adds to a block, near enough.
const BLOCK_OVERHEAD_BYTES: usize = 16;

impl Rings {
    /// Takes a ring out; its index stays taken until [`Rings::put`] or [`Rings::free`].
    pub(super) fn take(&mut self, index: u32) -> Ring {
        let ring = std::mem::take(&mut self.rings[index as usize]);
        self.entries_bytes -= block_bytes(&ring);
        ring
    }

    /// Puts a ring where `index` says, or in a free place.
    pub(super) fn put(&mut self, index: Option<u32>, ring: Ring) -> u32 {
        self.entries_bytes += block_bytes(&ring);
        let index = index.or_else(|| self.free.pop());
        if let Some(index) = index {
            self.rings[index as usize] = ring;
            return index;
        }
        if self.rings.len() == self.rings.capacity() {
            self.rings.reserve_exact(self.rings.len() / 4 + 4);
        }
        self.rings.push(ring);
        (self.rings.len() - 1) as u32
    }

    /// Forgets a ring, or the place of one that was taken out for good.
    pub(super) fn free(&mut self, index: u32) {
        drop(self.take(index));
        self.free.push(index);
        if self.free.len() == self.rings.len() {
            *self = Rings::default();
        }
    }

    pub(super) fn newest_us(&self, index: u32) -> u64 {
        self.rings[index as usize].newest_us()
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.entries_bytes + self.rings.capacity() * size_of::<Ring>() + self.free.capacity() * size_of::<u32>()
    }
}

fn block_bytes(ring: &Ring) -> usize {
    match ring.heap_bytes() {
        0 => 0,
        bytes => bytes + BLOCK_OVERHEAD_BYTES,
    }
}
