package outbox

import (
	"context"
	"errors"
	"fmt"

	"gorm.io/gorm"

	"github.com/gormoutbox/outbox/dialect"
	"github.com/gormoutbox/outbox/gormoutbox"
	"github.com/gormoutbox/outbox/migrator"
)

// AutoMigrate brings the tables of every instance on db to the version of this
// library, and records the outboxes that are new. It is safe to call from
// every node at start, also at the same time, and does nothing where all is
// done. It needs the right to create tables then only, and must not be called
// within a transaction. The context is that of the handle.
//
// Where migrations are made by another tool, package migrator writes them as
// SQL, and this is not needed.
func AutoMigrate(db *gorm.DB) error {
	if db == nil {
		return fmt.Errorf("%w: the handle is nil", ErrNotInstalled)
	}
	if _, err := gormoutbox.From(db); err == nil {
		return errors.New("outbox: migrate: the handle is in a transaction; give the one that db.Use was called on")
	}
	list := installed(db)
	if len(list) == 0 {
		return errNoPlugin
	}
	for _, in := range list {
		if err := in.AutoMigrate(db.Statement.Context); err != nil {
			return err
		}
	}
	return nil
}

// AutoMigrate is the function AutoMigrate for this instance alone.
func (in *Instance) AutoMigrate(ctx context.Context) error {
	b, err := in.binding()
	if err != nil {
		return err
	}
	err = in.eachTable(b, func(m *migrator.Migrator) error { return m.Up(ctx) })
	if err != nil {
		return fmt.Errorf("outbox: migrate: %w", err)
	}
	if err := b.admin.EnsureOutboxes(ctx, in.facts()); err != nil {
		return fmt.Errorf("outbox: record the outboxes: %w", err)
	}
	return nil
}

// Check says whether the instance can work: that the database answers, that
// the tables are there in the version of this library (ErrNotMigrated), and
// that SQLite is set up for it (WAL and a busy timeout). It is meant for
// readiness probes. The state of destinations is no part of it.
func (in *Instance) Check(ctx context.Context) error {
	b, err := in.binding()
	if err == nil {
		err = in.check(ctx, b)
	}
	if err != nil {
		return fmt.Errorf("outbox: check: %w", err)
	}
	return nil
}

func (in *Instance) check(ctx context.Context, b *binding) error {
	err := in.eachTable(b, func(m *migrator.Migrator) error { return m.Check(ctx) })
	if err != nil {
		return err
	}
	if lite, ok := b.storage.(*dialect.SQLite); ok {
		return lite.Check(ctx)
	}
	return nil
}

func (in *Instance) eachTable(b *binding, fn func(*migrator.Migrator) error) error {
	for _, name := range in.tables() {
		m, err := migrator.New(b.pool, migrator.Config{Dialect: b.dialect, Schema: name.Schema, Table: name.Table})
		if err != nil {
			return err
		}
		if err := fn(m); err != nil {
			return err
		}
	}
	return nil
}
