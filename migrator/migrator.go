package migrator

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/gormoutbox/outbox/internal/tables"
)

var (
	// ErrNotMigrated says that the tables are missing, or older than this
	// version of the library.
	ErrNotMigrated = errors.New("the outbox tables are not migrated")
	// ErrTooNew says that a newer version of the library has migrated the
	// tables. Whether this one could still work with them it cannot know.
	ErrTooNew = errors.New("the outbox tables are newer than this version of the library")
)

// Dialect is a database that the migrator speaks to. The values are the names
// of GORM's dialectors.
type Dialect string

// The databases.
const (
	Postgres Dialect = "postgres"
	SQLite   Dialect = "sqlite"
)

// Config names the database and the tables.
type Config struct {
	// Dialect is Postgres or SQLite. Required.
	Dialect Dialect
	// Schema is the PostgreSQL schema of the tables; Up creates it if it does
	// not exist. At most 63 bytes. Empty: the tables are looked for on the
	// search_path and created in its first schema. SQLite has no schemas.
	Schema string
	// Table is the message table. Required, at most 63 bytes. The names of
	// everything else are made from it.
	Table string
}

func (c Config) name() tables.Name { return tables.Name{Schema: c.Schema, Table: c.Table} }

func (c Config) validate() error {
	switch c.Dialect {
	case Postgres:
	case SQLite:
		if c.Schema != "" {
			return fmt.Errorf("Config.Schema is %q; it must be empty, for SQLite has no schemas", c.Schema)
		}
	default:
		return fmt.Errorf("Config.Dialect is %q; it must be %q or %q", c.Dialect, Postgres, SQLite)
	}
	return c.name().Validate()
}

// Migrator creates, upgrades, inspects and removes the tables of one outbox
// table name. Its methods are safe for concurrent use, in any number of
// processes.
type Migrator struct {
	db       *sql.DB
	config   Config
	database database
}

// New makes a migrator. It does not touch the database.
func New(db *sql.DB, cfg Config) (*Migrator, error) {
	if db == nil {
		return nil, errors.New("migrator: db is nil")
	}
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("migrator: %w", err)
	}
	m := &Migrator{db: db, config: cfg, database: postgres{}}
	if cfg.Dialect == SQLite {
		m.database = sqlite{}
	}
	return m, nil
}

// Up brings the tables to the version of this library, all or nothing. It
// waits for another node that is doing so, until ctx ends. On tables of the
// right version it changes nothing and needs no right but to read the meta
// table; on newer ones it fails with ErrTooNew.
func (m *Migrator) Up(ctx context.Context) error {
	if err := m.up(ctx); err != nil {
		return fmt.Errorf("migrate %s up: %w", m.config.name().Messages(), explain(err))
	}
	return nil
}

func (m *Migrator) up(ctx context.Context) error {
	err := m.Check(ctx)
	if !errors.Is(err, ErrNotMigrated) {
		return err
	}
	return m.database.locked(ctx, m.db, m.config, func(ctx context.Context, q querier) error {
		s, err := m.database.state(ctx, q, m.config)
		if err != nil {
			return err
		}
		if err := s.check(); !errors.Is(err, ErrNotMigrated) {
			return err // another node was faster
		}
		if s.version > 0 && !s.messages {
			// Made again it would give the same ids to other messages.
			return fmt.Errorf("version %d is recorded but the message table is missing: restore it, or call Down first", s.version)
		}
		if s.version == 0 {
			if err := m.database.prepare(ctx, q, m.config); err != nil {
				return err
			}
		}
		for v := s.version + 1; v <= latest; v++ {
			if err := m.run(ctx, q, v, Up, s.name); err != nil {
				return err
			}
		}
		return nil
	})
}

// Down drops both tables with everything in them: messages that are not yet
// delivered are lost. It keeps the schema. Where there are no tables of the
// outbox it does nothing.
func (m *Migrator) Down(ctx context.Context) error {
	err := m.database.locked(ctx, m.db, m.config, func(ctx context.Context, q querier) error {
		s, err := m.database.state(ctx, q, m.config)
		if err != nil {
			return err
		}
		if s.version > latest {
			return s.check()
		}
		for v := s.version; v > 0; v-- {
			if err := m.run(ctx, q, v, Down, s.name); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("migrate %s down: %w", m.config.name().Messages(), explain(err))
	}
	return nil
}

func (m *Migrator) run(ctx context.Context, q querier, version int, dir Direction, name tables.Name) error {
	list, err := statements(m.config.Dialect, version, dir, name)
	if err != nil {
		return err
	}
	for i, s := range list {
		if _, err := q.ExecContext(ctx, s); err != nil {
			return fmt.Errorf("version %d, statement %d: %w", version, i+1, err)
		}
	}
	return nil
}

// Check returns nil if the tables are there in the version of this library,
// otherwise ErrNotMigrated or ErrTooNew, wrapped with what to do, or what kept
// it from finding out. It runs two short queries; Status looks closer.
func (m *Migrator) Check(ctx context.Context) error {
	s, err := m.read(ctx)
	if err != nil {
		return err
	}
	return s.check()
}

// read looks at the state outside a transaction.
func (m *Migrator) read(ctx context.Context) (s state, err error) {
	err = retry(ctx, m.database.transient, func() error {
		s, err = m.database.state(ctx, m.db, m.config)
		return err
	})
	return s, err
}

// state is what is found of the tables.
type state struct {
	// name is where they are: with the schema, if they were found in one.
	name tables.Name
	// messages tells whether the message table is there.
	messages bool
	// version is 0 if there is no meta table or none is recorded in it.
	version      int
	installation string
}

func (s state) check() error {
	const remedy = "call outbox.AutoMigrate(db), or run the SQL of migrator.SQL"
	switch {
	case s.version > latest:
		return fmt.Errorf("%w: %s has version %d, the library %d: update the library", ErrTooNew, s.name.Messages(), s.version, latest)
	case s.version == 0:
		return fmt.Errorf("%w: no version of %s is recorded: %s", ErrNotMigrated, s.name.Messages(), remedy)
	case s.version < latest:
		return fmt.Errorf("%w: %s has version %d, the library %d: %s", ErrNotMigrated, s.name.Messages(), s.version, latest, remedy)
	case !s.messages:
		return fmt.Errorf("%w: %s is missing, though version %d is recorded", ErrNotMigrated, s.name.Messages(), s.version)
	}
	return nil
}

// explain adds to a refusal of the database what can be done about it.
func explain(err error) error {
	if sqlState(err) != insufficientPrivilege {
		return err
	}
	return fmt.Errorf("%w (a role that may do this can run the SQL of migrator.SQL instead; after that no such right is needed)", err)
}
