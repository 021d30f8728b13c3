//! The memory of a shard's longer logs. Each ring has a number, so a packed state needs four bytes to refer to it.
//!
//! ```text
//!   class of 4   │ ring │ ring │ free │ ring │        a ring's number: │ index in its class │ which class │
//!   class of 6   │ ring   │ ring   │
//!     ···
//!   large        → a block of its own each, of a ring or of the list of rings of a very long log
//! ```
//!
//! Short rings are stored side by side in size classes. The position of a ring follows from its number, so a check
//! loads the entries without loading a pointer first. Free places form a linked list in their own memory. A large ring
//! has a block and a pointer of its own.
//!
//! **Freeing memory.** A size class without rings is freed at once. When three quarters of a class are free, the shard
//! moves all its rings together. Only the slots store the numbers of rings, so that walks over the whole table, and is
//! done only if it frees enough.

use super::long::Long;
use super::ring::SHORT_CAPACITIES;

/// The entries of all longer logs of a shard. A packed state refers to its ring by a number.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rings {
    /// One for each of [`SHORT_CAPACITIES`]; empty until the first ring is stored.
    classes: Box<[SizeClass]>,
    /// The blocks of larger logs; an empty ring where one is free.
    large: Vec<Block>,
    /// The indices in `large` that are free.
    large_free: Vec<u32>,
    /// The bytes of the large blocks and of the size classes.
    bytes: usize,
    /// The bytes of the lists above.
    lists_bytes: usize,
}

/// The memory of one larger log.
#[derive(Clone, Debug)]
enum Block {
    /// The words of one ring.
    Ring(Box<[u64]>),
    /// The list of the rings of a very long log. Each ring has a number of its own.
    Long(Box<Long>),
}

/// The rings of one size, side by side in one block of memory.
#[derive(Clone, Debug, Default)]
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
    /// Allocates a ring of so many words, and returns its number. The words are arbitrary.
    pub(super) fn allocate(&mut self, words: usize) -> u32 {
        let Some(class) = SHORT_CAPACITIES.iter().position(|&capacity| capacity == words) else {
            return self.put_block(Block::Ring(vec![0; words].into()));
        };
        if self.classes.is_empty() {
            self.classes = (0..LARGE).map(|_| SizeClass::default()).collect();
            self.measure_lists();
        }
        let before = self.classes[class].heap_bytes();
        let place = self.classes[class].reserve(words);
        self.bytes += self.classes[class].heap_bytes() - before;
        (place << CLASS_BITS | class) as u32
    }

    /// Stores the list of the rings of a very long log, and returns its number.
    pub(super) fn put_long(&mut self, long: Long) -> u32 {
        self.put_block(Block::Long(Box::new(long)))
    }

    /// Returns the words of the ring with this number, which must be in use.
    ///
    /// # Panics
    /// Panics if the number is that of a list of rings.
    #[inline(always)]
    pub(super) fn words(&self, ring: u32) -> &[u64] {
        let (class, place) = split_number(ring);
        match self.classes.get(class) {
            Some(rings) => &rings.words[place * SHORT_CAPACITIES[class]..][..SHORT_CAPACITIES[class]],
            None => match &self.large[place] {
                Block::Ring(words) => words,
                Block::Long(_) => unreachable!("the number of a list of rings"),
            },
        }
    }

    /// Returns the words of the ring with this number, which must be in use.
    ///
    /// # Panics
    /// Panics if the number is that of a list of rings.
    #[inline(always)]
    pub(super) fn words_mut(&mut self, ring: u32) -> &mut [u64] {
        let (class, place) = split_number(ring);
        match self.classes.get_mut(class) {
            Some(rings) => rings.get_mut(place, SHORT_CAPACITIES[class]),
            None => match &mut self.large[place] {
                Block::Ring(words) => words,
                Block::Long(_) => unreachable!("the number of a list of rings"),
            },
        }
    }

    /// Returns the list of rings with this number.
    ///
    /// # Panics
    /// Panics if the number is that of a ring, or not in use.
    pub(super) fn long(&self, number: u32) -> &Long {
        match &self.large[split_number(number).1] {
            Block::Long(long) => long,
            Block::Ring(_) => unreachable!("the number of a ring"),
        }
    }

    /// Changes the list of rings with this number, and returns what `change` returns.
    ///
    /// # Panics
    /// Panics if the number is that of a ring, or not in use.
    pub(super) fn change_long<R>(&mut self, number: u32, change: impl FnOnce(&mut Long, &mut Rings) -> R) -> R {
        let place = split_number(number).1;
        let Block::Long(mut long) = std::mem::take(&mut self.large[place]) else {
            unreachable!("the number of a ring");
        };
        let before = long.list_bytes();
        let result = change(&mut long, self);
        self.bytes = self.bytes - before + long.list_bytes();
        self.large[place] = Block::Long(long);
        result
    }

    /// Frees the ring or the list of rings with this number, which must be in use. The rings in a list are not freed.
    pub(super) fn free(&mut self, number: u32) {
        let (class, place) = split_number(number);
        if class < LARGE {
            let before = self.classes[class].heap_bytes();
            self.classes[class].free(place, SHORT_CAPACITIES[class]);
            self.bytes -= before - self.classes[class].heap_bytes();
            return;
        }
        self.take_block(place);
        self.large_free.push(place as u32);
        if self.large_free.len() == self.large.len() {
            (self.large, self.large_free) = Default::default();
        }
        self.measure_lists();
    }

    /// Moves the ring with this number to `to`, and returns its number there. The ring here must not be used again.
    pub(super) fn move_ring(&mut self, ring: u32, to: &mut Rings) -> u32 {
        let (class, place) = split_number(ring);
        if class == LARGE {
            return to.put_block(self.take_block(place));
        }
        let moved = to.allocate(SHORT_CAPACITIES[class]);
        to.words_mut(moved).copy_from_slice(self.words(ring));
        moved
    }

    #[inline(always)]
    pub(crate) fn heap_bytes(&self) -> usize {
        self.bytes + self.lists_bytes
    }

    fn measure_lists(&mut self) {
        self.lists_bytes = size_of_val(&*self.classes)
            + self.large.capacity() * size_of::<Block>()
            + self.large_free.capacity() * size_of::<u32>();
    }

    /// Returns the bytes of the largest size class, which exists twice for a moment while it grows.
    pub(super) fn moving_bytes(&self) -> usize {
        self.classes.iter().map(SizeClass::heap_bytes).max().unwrap_or(0)
    }

    /// Returns whether it is worth moving all rings together, as `CounterShard::gather_rings` does.
    ///
    /// `true` if there is a size class of which less than a quarter is in use and more than `worth_bytes` bytes are
    /// free. Large rings are not considered, because each has a block of its own.
    pub(crate) fn is_sparse(&self, worth_bytes: usize) -> bool {
        self.classes.iter().zip(SHORT_CAPACITIES).any(|(class, words)| {
            let (all, used) = (class.words.len(), class.len * words);
            used < all / 4 && (all - used) * size_of::<u64>() > worth_bytes
        })
    }

    fn put_block(&mut self, block: Block) -> u32 {
        self.bytes += block.bytes();
        let place = match self.large_free.pop() {
            Some(place) => place as usize,
            None => {
                if self.large.len() == self.large.capacity() {
                    self.large.reserve_exact(self.large.len() / 4 + 4);
                }
                self.large.push(Block::default());
                self.large.len() - 1
            }
        };
        self.large[place] = block;
        self.measure_lists();
        (place << CLASS_BITS | LARGE) as u32
    }

    /// Takes a block out of its place, which is not free yet.
    fn take_block(&mut self, place: usize) -> Block {
        let block = std::mem::take(&mut self.large[place]);
        self.bytes -= block.bytes();
        block
    }
}

impl SizeClass {
    #[inline(always)]
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
            Block::Long(long) => size_of::<Long>() + long.list_bytes() + 2 * BLOCK_OVERHEAD_BYTES,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
                _ => {
                    let new: Box<[u64]> = (0..words as u64).map(|word| step * 1_000 + word).collect();
                    let ring = rings.allocate(words);
                    rings.words_mut(ring).copy_from_slice(&new);
                    kept.push((ring, new));
                }
            }
            let (ring, expected) = &kept[which.min(kept.len() - 1)];
            assert_eq!(rings.words(*ring), &**expected);
        }
        let bytes: usize = kept.iter().map(|(_, words)| size_of_val(&**words)).sum();
        assert!(rings.heap_bytes() >= bytes);
        let mut moved = Rings::default();
        for (ring, expected) in kept {
            let ring = rings.move_ring(ring, &mut moved);
            assert_eq!(moved.words(ring), &*expected);
            moved.free(ring);
        }
        assert_eq!(moved.bytes, 0);
    }
}
