// Package listener brings wake-ups: hints that messages may be ready, from the
// transaction that added them to the worker that delivers them.
//
// A wake takes one of two ways. Where this process relays the message's
// outbox, the Hub calls the engine at once, in memory. Where it does not, the
// Hub hands the wake to the Sender, which sends it as a NOTIFY after the
// commit and off the business transaction, together with whatever else was
// committed meanwhile. The Notifier of another process hears it.
//
//	commit -> Hub -> engine of this process
//	              -> Sender -> NOTIFY -> Notifier -> engine of another process
//
// Hints may be lost, doubled or late, and nothing here promises otherwise. The
// engine polls, so that a lost hint costs time and no message. What this
// package promises is to know whether hints get through: see Notifier.
package listener
