//! However requests end, what is left of every quota is exactly what their endings say.
//!
//! | `charge` | keeps the units of |
//! |---|---|
//! | `always` | every request that was admitted |
//! | `on_failure` | those that failed: a status from 400, an error, a panic, a timeout, a client that left |
//! | `on_success` | the others |
//!
//! Random requests end in random ways behind the layer. A ledger is kept of what each ending must have cost, and compared with
//! what the layer says afterwards, and with the counters of shadow rules, which nobody is told of.

mod in_process;
mod ledger;
mod on_redis;
mod over_sockets;
mod scripted;
