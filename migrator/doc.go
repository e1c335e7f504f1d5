// Package migrator keeps the outbox's tables: versioned DDL for PostgreSQL (14
// to 18) and SQLite, run by the library or exported for another tool.
//
//	m, err := migrator.New(db, migrator.Config{Dialect: migrator.Postgres, Table: "outboxer_messages"})
//	err = m.Up(ctx)
//
// There are two tables. The message table has the name that is configured; the
// meta table has the same with _meta, and holds the version, a random id of the
// installation, and facts about each outbox.
//
// Up may be called by all nodes at once. One does the work, in one transaction
// that also records the version, while the others wait for it. On PostgreSQL
// they wait for an advisory lock of the transaction, never of the session,
// which a pooler or a lost connection could leave behind; on SQLite for the
// write lock. When the work is done, Up reads the version and returns, so that
// a role without the right to create tables can call it.
//
// Who applies migrations with a tool of their own gets the same statements, the
// record of the version included, from SQL.
package migrator
