//! Sets of HTTP methods, as bits.

use http::Method;

/// Standard methods. The index of each is its bit.
const STANDARD: [&str; 9] = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE"];
/// The bit shared by all methods that no rule names.
const UNNAMED: u32 = 1 << 31;
/// Maximum number of other methods that the rules of a rule set may name.
const FURTHER_MAX: usize = 31 - STANDARD.len();

/// A set of methods. Its bits are those assigned by one [`MethodNames`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct MethodSet(u32);

impl MethodSet {
    /// All methods, including those that no rule names.
    pub(crate) const ALL: MethodSet = MethodSet(u32::MAX);
    /// No methods.
    pub(crate) const NONE: MethodSet = MethodSet(0);

    /// Returns whether the sets have a method in common.
    pub(crate) const fn overlaps(self, other: MethodSet) -> bool {
        self.0 & other.0 != 0
    }

    /// Returns a set with one method of this set, or an empty set if this one is empty.
    pub(crate) const fn first(self) -> MethodSet {
        MethodSet(self.0 & self.0.wrapping_neg())
    }

    /// Returns the intersection of the sets.
    #[must_use]
    pub(crate) const fn shared(self, other: MethodSet) -> MethodSet {
        MethodSet(self.0 & other.0)
    }

    /// Returns the union of the sets.
    #[must_use]
    pub(crate) const fn and(self, other: MethodSet) -> MethodSet {
        MethodSet(self.0 | other.0)
    }
}

/// The names of all methods used by the rules of one rule set, and the bit of each.
///
/// Names are compared without case. Methods are case-sensitive by the RFC, but some servers ignore case, and a rule for
/// `POST` must apply to `post` too.
#[derive(Clone, Debug, Default)]
pub(crate) struct MethodNames {
    further: Vec<Box<str>>,
}

/// The reason why a method cannot be used in a rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MethodError {
    /// The text is not a method name.
    Malformed,
    /// The rules already name the maximum number of methods that are not standard.
    TooMany,
}

impl MethodNames {
    /// Returns the set for a method in a rule, and assigns a bit to a new method.
    ///
    /// The set for GET includes HEAD, because servers answer HEAD by running the handler of GET.
    pub(crate) fn named(&mut self, name: &str) -> Result<MethodSet, MethodError> {
        let upper = name.to_ascii_uppercase();
        if Method::from_bytes(upper.as_bytes()).is_err() {
            return Err(MethodError::Malformed);
        }
        let set = self.of_name(&upper);
        if set.0 != UNNAMED {
            return Ok(if upper == "GET" { set.and(self.of_name("HEAD")) } else { set });
        }
        if self.further.len() == FURTHER_MAX {
            return Err(MethodError::TooMany);
        }
        self.further.push(upper.as_str().into());
        Ok(self.of_name(&upper))
    }

    /// Returns the set with the method of a request.
    pub(crate) fn of(&self, method: &Method) -> MethodSet {
        self.of_name(method.as_str())
    }

    /// Returns the set with the method of this name. All methods that no rule names give the same set.
    pub(crate) fn of_name(&self, name: &str) -> MethodSet {
        let all = STANDARD.into_iter().chain(self.further.iter().map(|name| &**name));
        let bit = all.into_iter().position(|known| known.eq_ignore_ascii_case(name));
        MethodSet(bit.map_or(UNNAMED, |bit| 1 << bit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(names: &MethodNames, name: &str) -> MethodSet {
        names.of(&Method::from_bytes(name.as_bytes()).unwrap())
    }

    #[test]
    fn get_includes_head_and_case_is_ignored() {
        let mut names = MethodNames::default();
        let (get, post) = (names.named("get").unwrap(), names.named("POST").unwrap());
        assert!(get.overlaps(of(&names, "GET")) && get.overlaps(of(&names, "HEAD")));
        assert!(post.overlaps(of(&names, "post")) && !post.overlaps(of(&names, "HEAD")));
        assert!(!names.named("HEAD").unwrap().overlaps(of(&names, "GET")));
    }

    #[test]
    fn other_methods_get_their_own_bits_up_to_a_maximum() {
        let mut names = MethodNames::default();
        let purge = names.named("PURGE").unwrap();
        assert!(purge.overlaps(of(&names, "purge")) && !purge.overlaps(of(&names, "BREW")));
        assert!(MethodSet::ALL.overlaps(of(&names, "BREW")));
        assert_eq!(names.named("two words"), Err(MethodError::Malformed));
        for n in 1..FURTHER_MAX {
            names.named(&format!("M{n}")).unwrap();
        }
        assert_eq!(names.named("ONEMORE"), Err(MethodError::TooMany));
        assert_eq!(names.named("purge"), Ok(purge));
    }
}
