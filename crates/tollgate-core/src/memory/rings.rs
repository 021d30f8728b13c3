//! The entries of a shard's long logs, by index, so that a slot needs four bytes for one.

#[derive(Debug, Default)]
pub(super) struct Rings {
    blocks: Vec<Box<[u64]>>,
    free: Vec<u32>,
    entries_bytes: usize,
}

/// What an allocator adds to a block, near enough.
const BLOCK_OVERHEAD_BYTES: usize = 16;

impl Rings {
    /// Takes a block out; its index stays taken until [`Rings::put`] or [`Rings::free`].
    #[inline]
    pub(super) fn take(&mut self, index: u32) -> Box<[u64]> {
        let block = std::mem::take(&mut self.blocks[index as usize]);
        self.entries_bytes -= block_bytes(&block);
        block
    }

    #[inline]
    pub(super) fn get_mut(&mut self, index: u32) -> &mut [u64] {
        &mut self.blocks[index as usize]
    }

    /// Puts a block where `index` says, or in a free place.
    #[inline]
    pub(super) fn put(&mut self, index: Option<u32>, block: Box<[u64]>) -> u32 {
        self.entries_bytes += block_bytes(&block);
        match index {
            Some(index) => {
                self.blocks[index as usize] = block;
                index
            }
            None => self.insert(block),
        }
    }

    fn insert(&mut self, block: Box<[u64]>) -> u32 {
        if let Some(index) = self.free.pop() {
            self.blocks[index as usize] = block;
            return index;
        }
        if self.blocks.len() == self.blocks.capacity() {
            self.blocks.reserve_exact(self.blocks.len() / 4 + 4);
        }
        self.blocks.push(block);
        (self.blocks.len() - 1) as u32
    }

    /// Forgets a block, or the place of one that was taken out for good.
    pub(super) fn free(&mut self, index: u32) {
        drop(self.take(index));
        self.free.push(index);
        if self.free.len() == self.blocks.len() {
            *self = Rings::default();
        }
    }

    #[inline]
    pub(super) fn heap_bytes(&self) -> usize {
        self.entries_bytes + self.blocks.capacity() * size_of::<Box<[u64]>>() + self.free.capacity() * size_of::<u32>()
    }
}

#[inline]
fn block_bytes(block: &[u64]) -> usize {
    match size_of_val(block) {
        0 => 0,
        bytes => bytes + BLOCK_OVERHEAD_BYTES,
    }
}
