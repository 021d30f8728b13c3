//! The doors of the Tollgate decision service.

pub mod doors;
