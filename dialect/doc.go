// Package dialect keeps an outbox's messages in a database: Postgres and
// SQLite implement engine.Storage, each with all its SQL.
//
// Both keep the same table (see the migrator package) and the same promises
// (see engine.Storage); they differ in how a lane is owned. Postgres holds an
// advisory lock in a transaction that lasts as long as the delivery, so any
// number of nodes share the work. SQLite has one writer, so nothing may be held
// while a relay works: a lane is owned in the memory of the one process that
// relays, a batch is read, delivered outside any transaction, and settled in
// one short write.
//
// A message's place in its lane is decided in two steps that the dialects
// share: the database gives the messages that are ready in the order of their
// ids and those with a due time in the order of that, both without what is
// blocked, and merge makes one page of them.
package dialect
