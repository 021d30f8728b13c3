//! The entries of a shard's long logs. Each ring has a number, so a slot needs four bytes to refer to it.
//!
//! ```text
//!   class of 4   │ ring │ ring │ free │ ring │        a ring's number: │ index in its class │ which class │
//!   class of 6   │ ring   │ ring   │
//!     ···
//!   large        → a block of its own each, of a ring or of the several rings of a very long log
//! ```
//!
//! Short rings are stored side by side in size classes. The position of a ring follows from its number, so a check
//! loads the entries without loading a pointer first. Free places form a linked list in their own memory. A large ring
//! has a block and a pointer of its own.
//!
//! **Freeing memory.** A size class without rings is freed at once. When three quarters of a class are free, the shard
//! moves all its rings together. Only the slots store the numbers of rings, so that walks over the whole table, and is
//! done only if it frees enough.

use crate::algorithm::{Long, SHORT_CAPACITIES};

/// The entries of all longer logs of a shard. A slot refers to its ring by a number.
#[derive(Debug, Default)]
pub(super) struct Rings {
    /// One for each of [`SHORT_CAPACITIES`]; empty until the first ring is stored.
    classes: Box<[SizeClass]>,
    /// The blocks of larger logs; an empty ring where one is free or taken out.
    large: Vec<Block>,
    /// The indices in `large` that are free.
    large_free: Vec<u32>,
    /// The bytes of the large blocks and of the size classes.
    bytes: usize,
}

/// The entries of one longer log: the words of one ring, or several rings.
#[derive(Debug)]
pub(super) enum Block {
    /// The words of one ring. Its head is in the slot.
    Ring(Box<[u64]>),
    /// Several rings, with their heads.
    Long(Box<Long>),
}

/// The rings of one size, side by side in one block of memory.
#[derive(Debug, Default)]
struct SizeClass {
    /// The words of all rings, including free ones.
    words: Vec<u64>,
    /// The index, plus 1, of the ring that was freed last. Its first word is the index of the one freed before it, plus
    /// 1. 0 ends the list.
    free: u64,
    /// The number of rings in use.
    len: usize,
}

/// The approximate overhead of an allocation, in bytes.
const BLOCK_OVERHEAD_BYTES: usize = 16;
const CLASS_BITS: u32 = 3;
/// The number of the class of large rings.
const LARGE: usize = SHORT_CAPACITIES.len();
const _: () = assert!(LARGE < 1 << CLASS_BITS);

impl Rings {
    /// Takes out the entries of the ring with this number, which must be in use.
    ///
    /// The number stays reserved until [`Rings::put`] or [`Rings::free`], one of which must follow.
    pub(super) fn take(&mut self, ring: u32) -> Block {
        let (class, place) = split_number(ring);
        if let Some(rings) = self.classes.get_mut(class) {
            return Block::Ring(rings.get_mut(place, SHORT_CAPACITIES[class]).into());
        }
        let block = std::mem::take(&mut self.large[place]);
        self.bytes -= block.bytes();
        block
    }

    /// Returns the words of the ring with this number, or `None` if it stands for a log of several rings.
    ///
    /// The number must be in use, and its entries not taken out.
    #[inline]
    pub(super) fn get_mut(&mut self, ring: u32) -> Option<&mut [u64]> {
        let (class, place) = split_number(ring);
        match self.classes.get_mut(class) {
            Some(rings) => Some(rings.get_mut(place, SHORT_CAPACITIES[class])),
            None => match &mut self.large[place] {
                Block::Ring(words) => Some(words),
                Block::Long(_) => None,
            },
        }
    }

    /// Stores the entries of a log, and returns the number under which they are found.
    ///
    /// `ring` is the number from which they were taken, or `None` for a new log. The result is the same number if the
    /// entries still belong to its size class. Otherwise it is a new one, and `ring` is freed.
    pub(super) fn put(&mut self, ring: Option<u32>, block: Block) -> u32 {
        let class = match &block {
            Block::Ring(words) => {
                SHORT_CAPACITIES.iter().position(|&capacity| capacity == words.len()).unwrap_or(LARGE)
            }
            Block::Long(_) => LARGE,
        };
        let place = match ring.map(|ring| (ring, split_number(ring))) {
            Some((_, (same, place))) if same == class => place,
            Some((other, _)) => {
                self.free(other);
                self.reserve(class)
            }
            None => self.reserve(class),
        };
        match block {
            Block::Ring(words) if class < LARGE => {
                self.classes[class].get_mut(place, SHORT_CAPACITIES[class]).copy_from_slice(&words);
            }
            block => {
                self.bytes += block.bytes();
                self.large[place] = block;
            }
        }
        (place << CLASS_BITS | class) as u32
    }

    /// Frees the ring with this number, which must be in use, and its entries if they were not taken out.
    pub(super) fn free(&mut self, ring: u32) {
        let (class, place) = split_number(ring);
        if class < LARGE {
            let before = self.classes[class].heap_bytes();
            self.classes[class].free(place, SHORT_CAPACITIES[class]);
            self.bytes -= before - self.classes[class].heap_bytes();
            return;
        }
        drop(self.take(ring));
        self.large_free.push(place as u32);
        if self.large_free.len() == self.large.len() {
            (self.large, self.large_free) = Default::default();
        }
    }

    #[inline]
    pub(super) fn heap_bytes(&self) -> usize {
        self.bytes
            + size_of_val(&*self.classes)
            + self.large.capacity() * size_of::<Block>()
            + self.large_free.capacity() * size_of::<u32>()
    }

    /// Returns the bytes of the largest size class, which exists twice for a moment while it grows.
    pub(super) fn moving_bytes(&self) -> usize {
        self.classes.iter().map(SizeClass::heap_bytes).max().unwrap_or(0)
    }

    /// Returns whether it is worth moving all rings together, as `Shard::gather_rings` does.
    ///
    /// `true` if there is a size class of which less than a quarter is in use and more than `worth_bytes` bytes are
    /// free. Large rings are not considered, because each has a block of its own.
    pub(super) fn is_sparse(&self, worth_bytes: usize) -> bool {
        self.classes.iter().zip(SHORT_CAPACITIES).any(|(class, words)| {
            let (all, used) = (class.words.len(), class.len * words);
            used < all / 4 && (all - used) * size_of::<u64>() > worth_bytes
        })
    }

    /// Reserves room for a ring in a size class, and returns the ring's index in the class.
    ///
    /// `class` is the index of the class in [`SHORT_CAPACITIES`], or [`LARGE`]. Allocates if no place is free.
    fn reserve(&mut self, class: usize) -> usize {
        if class < LARGE {
            if self.classes.is_empty() {
                self.classes = (0..LARGE).map(|_| SizeClass::default()).collect();
            }
            let before = self.classes[class].heap_bytes();
            let place = self.classes[class].reserve(SHORT_CAPACITIES[class]);
            self.bytes += self.classes[class].heap_bytes() - before;
            return place;
        }
        if let Some(place) = self.large_free.pop() {
            return place as usize;
        }
        if self.large.len() == self.large.capacity() {
            self.large.reserve_exact(self.large.len() / 4 + 4);
        }
        self.large.push(Block::default());
        self.large.len() - 1
    }
}

impl SizeClass {
    #[inline]
    fn get_mut(&mut self, place: usize, words: usize) -> &mut [u64] {
        &mut self.words[place * words..][..words]
    }

    fn reserve(&mut self, words: usize) -> usize {
        self.len += 1;
        if let Some(place) = (self.free as usize).checked_sub(1) {
            self.free = self.get_mut(place, words)[0];
            return place;
        }
        let end = self.words.len();
        if end == self.words.capacity() {
            self.words.reserve_exact((end / words / 4 + 4) * words);
        }
        self.words.resize(end + words, 0);
        end / words
    }

    fn free(&mut self, place: usize, words: usize) {
        self.len -= 1;
        if self.len == 0 {
            *self = SizeClass::default();
            return;
        }
        let next = std::mem::replace(&mut self.free, place as u64 + 1);
        self.get_mut(place, words)[0] = next;
    }

    fn heap_bytes(&self) -> usize {
        self.words.capacity() * size_of::<u64>()
    }
}

/// Splits a ring's number into the index of its size class and its index in the class.
#[inline(always)]
fn split_number(ring: u32) -> (usize, usize) {
    ((ring & ((1 << CLASS_BITS) - 1)) as usize, (ring >> CLASS_BITS) as usize)
}

impl Default for Block {
    fn default() -> Block {
        Block::Ring(Box::default())
    }
}

impl Block {
    fn bytes(&self) -> usize {
        match self {
            Block::Ring(words) if words.is_empty() => 0,
            Block::Ring(words) => size_of_val(&**words) + BLOCK_OVERHEAD_BYTES,
            Block::Long(long) => size_of::<Long>() + long.heap_bytes() + long.segments() * BLOCK_OVERHEAD_BYTES,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(words: usize, mark: u64) -> Box<[u64]> {
        (0..words as u64).map(|word| mark * 1_000 + word).collect()
    }

    fn words_of(block: Block) -> Box<[u64]> {
        match block {
            Block::Ring(words) => words,
            Block::Long(_) => panic!("a ring"),
        }
    }

    #[test]
    fn rings_of_every_size_keep_their_words_and_free_their_memory() {
        let mut rings = Rings::default();
        let mut kept: Vec<(u32, Box<[u64]>)> = Vec::new();
        let mut random = 7_u64;
        for step in 0..20_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let words = [4, 6, 8, 12, 16, 24, 32, 33, 48, 101][(random >> 60) as usize % 10];
            let which = (random >> 33) as usize % kept.len().max(1);
            match random >> 40 & 3 {
                // In every second phase most operations remove a ring.
                0 | 1 if kept.len() > 3 && step / 2_000 % 2 == 1 => {
                    let (ring, _) = kept.swap_remove(which);
                    rings.free(ring);
                }
                2 if !kept.is_empty() => {
                    assert_eq!(words_of(rings.take(kept[which].0)), kept[which].1);
                    let other = block(words, step);
                    kept[which] = (rings.put(Some(kept[which].0), Block::Ring(other.clone())), other);
                }
                _ => {
                    let new = block(words, step);
                    kept.push((rings.put(None, Block::Ring(new.clone())), new));
                }
            }
            let (ring, expected) = &kept[which.min(kept.len() - 1)];
            assert_eq!(rings.get_mut(*ring).unwrap(), &**expected);
        }
        let bytes: usize = kept.iter().map(|(_, block)| size_of_val(&**block)).sum();
        assert!(rings.heap_bytes() >= bytes);
        for (ring, expected) in kept {
            assert_eq!(words_of(rings.take(ring)), expected);
            rings.free(ring);
        }
        assert_eq!(rings.bytes, 0);
    }
}
