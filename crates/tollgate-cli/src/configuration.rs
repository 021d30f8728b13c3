//! Reading a configuration, and telling what was found in it.

use std::path::Path;

use tollgate::config::{Finding, Loaded, Loader};

use crate::Failure;
use crate::arguments::{StoreChoice, Validate};

/// What reads a configuration for the store that will be used.
pub(crate) fn loader(store: &StoreChoice) -> Loader {
    match store.said() {
        Some(url) => Loader::new().store(url),
        None => Loader::new(),
    }
}

/// Reads a configuration; what is odd about it goes to standard error.
pub(crate) fn load(file: &Path, store: &StoreChoice) -> Result<Loaded, Failure> {
    let mut loaded = loader(store).load(file).map_err(Failure::Configuration)?;
    for finding in loaded.findings.drain(..) {
        tell(finding);
    }
    Ok(loaded)
}

pub(crate) fn validate(arguments: &Validate) -> Result<(), Failure> {
    let loaded = load(&arguments.file, &arguments.store)?;
    println!(
        "{} can be used: {} rules, {} plans",
        arguments.file.display(),
        loaded.rules.rules().len(),
        loaded.rules.plans().len()
    );
    Ok(())
}

fn tell(finding: Finding) {
    eprintln!("{:?}", miette::Report::new(finding));
}
