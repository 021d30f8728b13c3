//! Sets of HTTP methods, as bits.

use http::Method;

/// The standard methods. The index of each is the number of its bit in a [`MethodSet`].
const STANDARD: [&str; 9] = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE"];
/// The bit that stands for every method that is neither standard nor named by a rule.
const UNNAMED: u32 = 1 << 31;
/// Maximum number of non-standard methods that the rules of a rule set may name.
const FURTHER_MAX: usize = 31 - STANDARD.len();

/// A set of HTTP methods, one bit each. A [`MethodNames`] assigns the bits, so only sets of the same one are comparable.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct MethodSet(u32);

impl MethodSet {
    /// All methods, including non-standard ones that no rule names.
    pub(crate) const ALL: MethodSet = MethodSet(u32::MAX);
    /// No methods.
    pub(crate) const NONE: MethodSet = MethodSet(0);

    /// Returns whether the sets have a method in common.
    pub(crate) const fn overlaps(self, other: MethodSet) -> bool {
        self.0 & other.0 != 0
    }

    /// Returns a set with one arbitrary method of this set, or an empty set if this one is empty.
    pub(crate) const fn first(self) -> MethodSet {
        MethodSet(self.0 & self.0.wrapping_neg())
    }

    /// Returns the methods that are in both sets.
    #[must_use]
    pub(crate) const fn intersection(self, other: MethodSet) -> MethodSet {
        MethodSet(self.0 & other.0)
    }

    /// Returns the methods that are in at least one of the sets.
    #[must_use]
    pub(crate) const fn union(self, other: MethodSet) -> MethodSet {
        MethodSet(self.0 | other.0)
    }
}

/// The methods that the rules of one rule set name, and the bit of each in a [`MethodSet`].
///
/// Names are compared without case. Methods are case-sensitive by the RFC, but some servers ignore case, and a rule for
/// `POST` must apply to `post` too.
#[derive(Clone, Debug, Default)]
pub(crate) struct MethodNames {
    further: Vec<Box<str>>,
}

/// The error for a text that cannot be used as a method of a rule: it is malformed, or there are too many methods.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MethodError {
    /// The text is not the name of an HTTP method.
    Malformed,
    /// The method is not standard, and the rules already name [`FURTHER_MAX`] others that are not.
    TooMany,
}

impl MethodNames {
    /// Returns the set of methods that a rule with this method matches. Assigns a bit to a method that has none yet.
    ///
    /// The set contains the method, and for GET also HEAD, because servers answer HEAD by running the handler of GET.
    ///
    /// # Errors
    /// If the text is not the name of a method, or if no bit is left for it.
    pub(crate) fn register(&mut self, name: &str) -> Result<MethodSet, MethodError> {
        let upper = name.to_ascii_uppercase();
        if Method::from_bytes(upper.as_bytes()).is_err() {
            return Err(MethodError::Malformed);
        }
        let set = self.set_of_name(&upper);
        if set.0 != UNNAMED {
            return Ok(if upper == "GET" { set.union(self.set_of_name("HEAD")) } else { set });
        }
        if self.further.len() == FURTHER_MAX {
            return Err(MethodError::TooMany);
        }
        self.further.push(upper.as_str().into());
        Ok(self.set_of_name(&upper))
    }

    /// Returns the set that contains only the method of a request.
    pub(crate) fn set_of(&self, method: &Method) -> MethodSet {
        self.set_of_name(method.as_str())
    }

    /// Returns the set that contains only the method with this name.
    ///
    /// All non-standard methods that no rule names have the same set.
    pub(crate) fn set_of_name(&self, name: &str) -> MethodSet {
        let all = STANDARD.into_iter().chain(self.further.iter().map(|name| &**name));
        let bit = all.into_iter().position(|known| known.eq_ignore_ascii_case(name));
        MethodSet(bit.map_or(UNNAMED, |bit| 1 << bit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(names: &MethodNames, name: &str) -> MethodSet {
        names.set_of(&Method::from_bytes(name.as_bytes()).unwrap())
    }

    #[test]
    fn get_includes_head_and_case_is_ignored() {
        let mut names = MethodNames::default();
        let (get, post) = (names.register("get").unwrap(), names.register("POST").unwrap());
        assert!(get.overlaps(of(&names, "GET")) && get.overlaps(of(&names, "HEAD")));
        assert!(post.overlaps(of(&names, "post")) && !post.overlaps(of(&names, "HEAD")));
        assert!(!names.register("HEAD").unwrap().overlaps(of(&names, "GET")));
    }

    #[test]
    fn other_methods_get_their_own_bits_up_to_a_maximum() {
        let mut names = MethodNames::default();
        let purge = names.register("PURGE").unwrap();
        assert!(purge.overlaps(of(&names, "purge")) && !purge.overlaps(of(&names, "BREW")));
        assert!(MethodSet::ALL.overlaps(of(&names, "BREW")));
        assert_eq!(names.register("two words"), Err(MethodError::Malformed));
        for n in 1..FURTHER_MAX {
            names.register(&format!("M{n}")).unwrap();
        }
        assert_eq!(names.register("ONEMORE"), Err(MethodError::TooMany));
        assert_eq!(names.register("purge"), Ok(purge));
    }
}
