package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"gorm.io/gorm"

	"github.com/gormoutbox/outbox/dialect"
	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/gormoutbox"
	"github.com/gormoutbox/outbox/internal/tables"
	"github.com/gormoutbox/outbox/listener"
	"github.com/gormoutbox/outbox/migrator"
)

// Instance is a set of outboxes on one database. It is made by New and
// installed with db.Use. All methods are safe for concurrent use.
type Instance struct {
	config   Config // validated, with its defaults
	outboxes map[string]*Outbox

	installing sync.Mutex // serialises Initialize
	bound      atomic.Pointer[binding]

	starting chan struct{} // of one: full while a Start is under way
	eng      atomic.Pointer[engine.Engine]
	detach   atomic.Pointer[func()] // keeps commits from waking the engine
}

// binding is what an instance has once it knows its database.
type binding struct {
	pool    *sql.DB // the primary
	dialect migrator.Dialect
	storage engine.Storage
	admin   *dialect.Admin
	hub     *listener.Hub
	sender  *listener.Sender // what the hub cannot deliver in memory
}

// New makes an instance. It looks at nothing but the configuration; an error
// tells everything that is wrong with it, naming each field, its value and its
// bounds.
func New(c Config) (*Instance, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	in := &Instance{
		config:   c.withDefaults(),
		outboxes: make(map[string]*Outbox, len(c.Outboxes)),
		starting: make(chan struct{}, 1),
	}
	for i := range in.config.Outboxes {
		o := &in.config.Outboxes[i]
		in.outboxes[o.Name] = o
	}
	return in, nil
}

// Name is that of the plugin: "gormoutbox", or "gormoutbox:" and Config.Name.
func (in *Instance) Name() string {
	if in.config.Name == "" {
		return "gormoutbox"
	}
	return "gormoutbox:" + in.config.Name
}

// Initialize is called by db.Use. It starts nothing, writes nothing, and may
// run several times: dbresolver hands it the databases that it opens, whose
// pools are then wrapped like the first. An instance serves one database, the
// one it was installed on first; another is an error.
func (in *Instance) Initialize(db *gorm.DB) error {
	if err := in.initialize(db); err != nil {
		return fmt.Errorf("outbox: initialize: %w", err)
	}
	return nil
}

func (in *Instance) initialize(db *gorm.DB) error {
	in.installing.Lock()
	defer in.installing.Unlock()
	pool, err := gormoutbox.Primary(db)
	if err != nil {
		return err
	}
	b := in.bound.Load()
	// A database that is opened with a copy of the first one's configuration,
	// as dbresolver does, has the plugin in it already.
	reopened := db.Plugins[in.Name()] == gorm.Plugin(in)
	if b != nil && b.pool != pool && !reopened {
		return errors.New("the instance is installed on another database; make one for each")
	}
	if b == nil {
		if b, err = in.bind(db.Dialector.Name(), pool); err != nil {
			return err
		}
	}
	if err := gormoutbox.Install(db); err != nil {
		return err
	}
	in.bound.Store(b)
	return nil
}

func (in *Instance) bind(dialector string, pool *sql.DB) (*binding, error) {
	b := &binding{pool: pool, dialect: migrator.Dialect(dialector)}
	config := dialect.Config{Outboxes: make(map[string]tables.Name)}
	for name, o := range in.outboxes {
		config.Outboxes[name] = in.table(o)
	}
	switch b.dialect {
	case migrator.Postgres:
		pg, err := dialect.NewPostgres(pool, config)
		if err != nil {
			return nil, err
		}
		b.storage, b.admin = pg, pg.Admin()
	case migrator.SQLite:
		if in.config.Schema != "" {
			return nil, fmt.Errorf("Config.Schema is %q; it must be empty, for SQLite has no schemas", in.config.Schema)
		}
		lite, err := dialect.NewSQLite(pool, config)
		if err != nil {
			return nil, err
		}
		b.storage, b.admin = lite, lite.Admin()
	default:
		return nil, fmt.Errorf("no storage for the dialect %q; it must be postgres or sqlite", dialector)
	}
	b.sender = listener.NewSender(b.notify, in.config.Logger)
	b.hub = listener.NewHub(nil)
	if in.config.Notify == AfterCommit {
		b.hub = listener.NewHub(b.sender)
	}
	return b, nil
}

// notify tells other nodes at once.
func (b *binding) notify(ctx context.Context, wakes []engine.Wake) error {
	return b.storage.Notify(ctx, nil, wakes)
}

// binding returns what Initialize has found.
func (in *Instance) binding() (*binding, error) {
	if b := in.bound.Load(); b != nil {
		return b, nil
	}
	return nil, errNoPlugin
}

// outbox finds an outbox by its name.
func (in *Instance) outbox(name string) (*Outbox, error) {
	o, ok := in.outboxes[name]
	if !ok {
		return nil, fmt.Errorf("%w %q; there is %s", ErrUnknownOutbox, name, quoted(in.config.names()))
	}
	return o, nil
}

func (in *Instance) table(o *Outbox) tables.Name {
	return tables.Name{Schema: in.config.Schema, Table: o.Table}
}

// tables lists the message tables, each once, in the order of the outboxes.
func (in *Instance) tables() []tables.Name {
	var names []tables.Name
	for i := range in.config.Outboxes {
		if name := in.table(&in.config.Outboxes[i]); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// installed lists the instances that were given to db.Use, by their names.
func installed(db *gorm.DB) []*Instance {
	var list []*Instance
	for _, plugin := range db.Plugins {
		if in, ok := plugin.(*Instance); ok {
			list = append(list, in)
		}
	}
	slices.SortFunc(list, func(a, b *Instance) int { return strings.Compare(a.Name(), b.Name()) })
	return list
}
